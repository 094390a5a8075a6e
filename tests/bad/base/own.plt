# What jobs with a network of a user's own start from: good as it is.
model {
  network = python("nets:network")
  loss    = cross_entropy()
}

data {
  source = stdlib(context = 16)
  batch  = 8
}

devices {
  cpus = 2
}

train {
  steps     = 10
  optimizer = adamw()
}
