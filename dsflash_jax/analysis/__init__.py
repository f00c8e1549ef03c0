"""Measures on arrays: functions return data, never figures."""
