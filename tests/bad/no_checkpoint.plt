import "base/digits.plt"

checkpoint {
  every  = 10 steps
  resume = "kept/step-00000999" #! W0812
}
