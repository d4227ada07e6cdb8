"""Source models: ResNets with batch, group or filter response norm, and their checkpoints."""
