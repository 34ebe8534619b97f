"""Parts for other libraries, each in a module of its name that imports that library."""
