"""The runtime: commands, dispatch, transport, workers and clusters of one torch.distributed job."""
