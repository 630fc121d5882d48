"""The command `kvfs`: one file per verb."""
