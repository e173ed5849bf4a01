"""The errors a user can meet. A leaf: it imports nothing, so every layer of the project may use it."""


class LigerError(ValueError):
    """Any bad input: the message names the file, tensor, key or argument, and what was expected."""


class ConfigError(LigerError):
    """A config.json (or a config object) that no model can be built from."""


class CheckpointError(LigerError):
    """A folder or file of weights that is missing, broken, or belongs to another model."""


class HubError(LigerError):
    """A repository that could not be fetched."""
