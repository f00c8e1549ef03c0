"""The model's arithmetic as pure functions on arrays."""
