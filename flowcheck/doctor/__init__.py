"""`flowcheck doctor`: whether a mirror delivers what is needed, and what to change."""
