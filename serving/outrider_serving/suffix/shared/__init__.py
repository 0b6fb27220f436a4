"""The shared log: what one pod has finished, every pod may propose. Outputs go through Redis streams."""
