"""What each method of synchronizing parameters does to a plan: one module a method, of the method's name (``soap.strategy.methods``)."""
