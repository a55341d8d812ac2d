"""From a mirror port to transport data: sources, frames, TCP reassembly."""
