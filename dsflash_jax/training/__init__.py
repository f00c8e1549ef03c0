"""Training of lab-size models: corpus, tasks, losses, optimiser, checkpoints, loop and held-out evaluation."""
