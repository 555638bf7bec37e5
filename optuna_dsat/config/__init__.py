"""Read and write DeepSpeed configs: batch sizes, knobs, search spaces."""
