"""Text in, micro-batches out: reads rows, tokenises them once into a cache on disk, packs and shuffles them."""
