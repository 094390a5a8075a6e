import "weights_of_another.plt"

model {
  weights = pretrained(
    "wrapped.safetensors",
    only          = ["module.*", "modul.*"], #! W0724
    rename        = ["modul.* -> *"], #! E0724
    allow_missing = ["haed.*"], #! E0724
  )
}
