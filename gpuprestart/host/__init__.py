"""What the machine offers, one module per neighbour; nothing here knows a word of the policy."""
