"""Who proposes tokens for the target to verify: one module each, behind `base.Proposer`."""
