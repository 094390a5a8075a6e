import "base/gpt.plt"

data {
  validation = 5%
}

train {
  early_stopping = highest(acuracy, patience = 2) #! E0317
}

evaluate {
  every   = 5 steps
  metrics = [accuracy, f1(average = each)]
}

checkpoint {
  best = highest(f1) #! E0317
}
