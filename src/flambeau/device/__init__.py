"""torch.device("flambeau")."""
