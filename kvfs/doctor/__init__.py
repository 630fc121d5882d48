"""What `kvfs doctor` knows: facts about a mount and its machine, and rules that judge them."""
