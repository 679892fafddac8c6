"""The KV cache as bookkeeping: blocks, tables and the prefix index; no tensors, no clock."""
