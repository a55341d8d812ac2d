"""From transport data to a model step: schedules, buckets, optimizer, shadow state."""

import mirror  # noqa: F401  decides where compiled kernels are kept, for those of this package too
