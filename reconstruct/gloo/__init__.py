"""Gloo over TCP: framing, the ring's schedule, and the decoder from spans to landings."""
