import "base/digits.plt"

model {
  network = python("odd.tensor") #! E0135
  loss    = python("nets/mydata.py:load") #! E0135
}

train {
  clip = 0 #! E0125
}
