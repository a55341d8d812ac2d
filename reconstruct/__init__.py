"""From transport data to a model step: schedules, buckets, optimizer, shadow state."""
