model {
  network = python("structures:Long")
  loss    = python("structures:mean_distance", over = all) #! E0628
}

data {
  source  = python("structures:Pairs")
  collate = python("structures:stacked")
  batch   = 4
}

devices {
  cpus = 2
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
