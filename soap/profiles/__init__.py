"""What devices do: data sheets with their sources, a roofline over them, a quick measurement of this machine, and a store of what a model's
computations took, which is asked first."""
