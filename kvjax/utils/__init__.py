"""Helpers for files, processes, settings and compiled programs, independent of models and caches."""
