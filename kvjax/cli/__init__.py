"""Modules of the `kvjax NAME` commands."""
