"""What is claimed about papers, measured again: tables, figures and verdicts."""
