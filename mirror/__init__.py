"""From a mirror port to transport data: sources, frames, TCP reassembly."""

from mirror.kernel_cache import use_own_cache

use_own_cache()
