"""Pure decisions about slices, batches and strategies: host-pure."""
