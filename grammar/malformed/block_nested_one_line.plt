train { optimizer { lr = 3e-4 }, steps = 5 }
