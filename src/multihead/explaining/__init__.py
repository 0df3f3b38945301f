"""What a layer will do and what it costs: asked without running it, or measured beside that."""
