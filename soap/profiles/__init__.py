"""What devices do: data sheets with their sources, a roofline over them, and a quick measurement of this machine."""
