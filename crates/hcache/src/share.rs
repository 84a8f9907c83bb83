//! A user's share of something of which there is a fixed amount, where other users may take as much as they get.
//!
//! Half of the amount is reserved, in equal parts, one for each user; the other half is for those who come first. So whatever
//! the others take, each user gets its part, and a user beside idle ones gets more than half. If there are more users than
//! pieces, nobody gets a second piece before the others have their first.
//!
//! Not here: limits of each user on its own.

use std::collections::BTreeMap;

/// A user's share, and what is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// What the user has.
    pub own: u64,
    /// What nobody has.
    pub free: u64,
    /// What is reserved for each user, including what it has.
    pub reserved: u64,
    /// How much more the user may have.
    pub available: u64,
}

impl Share {
    /// Returns the share of `user`, one of so many `users` by number, of an `amount` of which `held` is taken: by whom, and how
    /// much, in any number of pieces.
    pub fn of(
        user: u64,
        users: usize,
        amount: u64,
        held: impl IntoIterator<Item = (u64, u64)>,
    ) -> Self {
        let mut of_each = BTreeMap::from([(user, 0)]);
        let mut free = amount;
        for (holder, taken) in held {
            *of_each.entry(holder).or_insert(0) += taken;
            free = free.saturating_sub(taken);
        }
        let users = users.max(of_each.len()) as u64;
        let reserved = (amount / 2 / users).max(1);
        let own = of_each.remove(&user).unwrap_or(0);
        let others = of_each.values().map(|held| reserved.saturating_sub(*held));
        let absent = users - 1 - of_each.len() as u64;
        let of_others = others.sum::<u64>() + absent * reserved;
        let from_reserve = reserved.saturating_sub(own).min(free);
        Self {
            own,
            free,
            reserved,
            available: free.saturating_sub(of_others).max(from_reserve),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_user_alone_may_have_all_and_one_beside_others_all_but_their_parts() {
        assert_eq!(Share::of(7, 1, 256, []).available, 256);
        let share = Share::of(7, 4, 256, [(7, 10), (8, 2), (7, 20)]);
        let expected = Share {
            own: 30,
            free: 224,
            reserved: 32,
            available: 224 - 30 - 2 * 32,
        };
        assert_eq!(share, expected);
        assert_eq!(Share::of(7, 0, 0, []).available, 0);
    }

    #[test]
    fn more_users_than_pieces_get_one_each_as_long_as_there_are_any() {
        let mut held = Vec::new();
        for user in 0..10 {
            for _ in 0..3 {
                if Share::of(user, 10, 4, held.clone()).available > 0 {
                    held.push((user, 1));
                }
            }
        }
        assert_eq!(held, [(0, 1), (1, 1), (2, 1), (3, 1)]);
    }

    proptest! {
        #[test]
        fn whatever_others_take_a_user_gets_its_part(
            amount in 0..5000_u64, users in 1..30_usize,
            wishes in prop::collection::vec((0..30_u64, 1..3000_u64), 0..200),
        ) {
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (user, wish) in wishes {
                let user = user % users as u64;
                let share = Share::of(user, users, amount, held.clone());
                let taken = wish.min(share.available);
                held.push((user, taken));
            }
            prop_assert!(held.iter().map(|(_, taken)| taken).sum::<u64>() <= amount);
            for user in 0..users as u64 {
                let share = Share::of(user, users, amount, held.clone());
                let part = amount / 2 / users as u64;
                prop_assert!(share.own + share.available >= part, "{share:?}");
            }
        }
    }
}
