model { #! E0109
  network = mlp
}

train { #! E0109
  optimizer = none #! E0109
}
#! E0109
