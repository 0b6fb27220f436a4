"""What was seen before, and what followed it: the index in the pod, and the log that pods share."""
