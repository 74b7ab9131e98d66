"""The PyTorch device torch.device("flambeau")."""
