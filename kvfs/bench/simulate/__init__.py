"""What pools of several sizes and policies would find of a trace, for `kvfs simulate`."""
