"""Leaves that families share. None of them knows a family or takes a flag for one."""
