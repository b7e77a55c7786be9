"""Scores, one method a file."""
