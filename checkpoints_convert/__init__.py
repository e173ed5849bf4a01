"""The bytes: Hugging Face folders in and out, the hub, and converters of other formats into such folders.

Knows names, shapes and files, but no module. Installed as ``ligermodels.checkpoints_convert``.
"""
