"""Commands that plan for recorded loads and convert files, without a balancer."""
