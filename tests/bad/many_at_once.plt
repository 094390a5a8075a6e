import "base/digits.plt"

model {
  network = [flatten(), liner(10)] #! E0130
  loss    = cross_entropy(smoothing = 0.1) #! E0131
}

data {
  bach = 64 #! E0107
}

train {
  optimizer = sgd(lr = fast) #! E0120
  clip      = -1 #! E0125
}

memroy { #! E0106
  limit = 76GiB
}
