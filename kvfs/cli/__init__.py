"""The command `kvfs`: one file a verb."""
