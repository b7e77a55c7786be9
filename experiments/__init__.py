"""Measurements of the papers' claims: tables, figures and verdicts."""
