"""Comparisons with others, and measurements of chips that are not there: run from a checkout."""
