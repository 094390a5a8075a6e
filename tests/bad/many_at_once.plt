import "base/digits.plt"

model {
  network = [flatten(), liner(10)] #! E0106
  loss    = cross_entropy(smoothing = 0.1) #! E0107
}

data {
  bach = 64 #! E0102
}

train {
  optimizer = sgd(lr = fast) #! E0105
  clip      = -1 #! E0110
}

memroy { #! E0101
  limit = 76GiB
}
