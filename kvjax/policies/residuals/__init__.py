"""Residuals, one method a file."""
