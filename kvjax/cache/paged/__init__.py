"""Slots on pages, for heads with budgets of their own."""
