"""What slots make possible after training: their scores one by one, selections, masks, and what they are like."""
