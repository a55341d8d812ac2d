"""NCCL over RoCE: communicators, schedules, payload formats, and the decoder from spans to landings."""
