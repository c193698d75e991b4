"""One module for each kind of task source: data sets, functions, environments of other libraries."""
