//! A consumer group: who is assigned which lanes.
//!
//! As with the cooperative protocol, a lane moves only after its owner has released it, or after the group has given up on
//! the owner.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::transport::kafka::consumer::Rebalance;

/// The coordinator of the group.
#[derive(Default)]
pub struct Group {
    /// Members, with the instance of each.
    members: BTreeMap<u64, usize>,
    /// Assigned lanes.
    owners: BTreeMap<i32, u64>,
    /// Lanes that their owner was asked to release.
    revoked: BTreeSet<i32>,
    /// Members whose process is gone.
    dead: BTreeSet<u64>,
    mail: BTreeMap<u64, VecDeque<Rebalance>>,
    joined: u64,
    lanes: i32,
}

impl Group {
    pub fn set_lanes(&mut self, lanes: i32) {
        self.lanes = lanes;
    }

    /// An instance joins: its member ID. Its members of before are dead, which the group notices later.
    pub fn join(&mut self, node: usize) -> u64 {
        let before = self.members.iter().filter(|(_, of)| **of == node).map(|(member, _)| *member);
        self.dead.extend(before);
        self.joined += 1;
        self.members.insert(self.joined, node);
        self.joined
    }

    /// A member leaves, having released all its lanes.
    pub fn leave(&mut self, member: u64) {
        self.members.remove(&member);
        self.mail.remove(&member);
        self.drop_lanes_of(member);
    }

    /// The group gives up on a member, which learns of it when it asks.
    pub fn expire(&mut self, member: u64) {
        if self.members.remove(&member).is_some() {
            let lanes = self.owners.iter().filter(|(_, owner)| **owner == member).map(|(lane, _)| *lane).collect();
            self.mail.entry(member).or_default().push_back(Rebalance::Revoked { lanes, lost: true });
            self.drop_lanes_of(member);
        }
    }

    fn drop_lanes_of(&mut self, member: u64) {
        let lanes: Vec<i32> =
            self.owners.iter().filter(|(_, owner)| **owner == member).map(|(lane, _)| *lane).collect();
        for lane in lanes {
            self.owners.remove(&lane);
            self.revoked.remove(&lane);
        }
    }

    pub fn is_dead(&self, member: u64) -> bool {
        self.dead.contains(&member)
    }

    pub fn is_member(&self, member: u64) -> bool {
        self.members.contains_key(&member)
    }

    pub fn members(&self) -> Vec<(u64, usize)> {
        self.members.iter().map(|(member, node)| (*member, *node)).collect()
    }

    /// The instance that owns each lane, once nothing moves any more.
    pub fn settled(&self) -> Option<Vec<(i32, usize)>> {
        let has_read = |member: &u64| self.mail.get(member).is_none_or(VecDeque::is_empty);
        let is_quiet = self.revoked.is_empty() && self.members.keys().all(has_read);
        let is_alive = self.members.keys().all(|member| !self.dead.contains(member));
        let owner = |lane| Some((lane, *self.members.get(self.owners.get(&lane)?)?));
        if is_quiet && is_alive { (0..self.lanes).map(owner).collect() } else { None }
    }

    /// The next message to a member.
    pub fn next(&mut self, member: u64) -> Option<Rebalance> {
        self.mail.get_mut(&member)?.pop_front()
    }

    /// A member has released a lane.
    pub fn released(&mut self, member: u64, lane: i32) {
        if self.owners.get(&lane) == Some(&member) && self.revoked.remove(&lane) {
            self.owners.remove(&lane);
        }
    }

    /// Moves lanes towards an even assignment.
    pub fn rebalance(&mut self) {
        let members: Vec<u64> = self.members.keys().copied().collect();
        if members.is_empty() {
            return;
        }
        for lane in 0..self.lanes {
            // Depends on who has joined last, so that lanes move often.
            let wanted = members[(lane as usize + self.joined as usize) % members.len()];
            match self.owners.get(&lane) {
                Some(owner) if *owner != wanted && self.revoked.insert(lane) => {
                    let revoked = Rebalance::Revoked { lanes: vec![lane], lost: false };
                    self.mail.entry(*owner).or_default().push_back(revoked);
                }
                Some(_) => {}
                None => {
                    self.owners.insert(lane, wanted);
                    self.mail.entry(wanted).or_default().push_back(Rebalance::Assigned(vec![lane]));
                }
            }
        }
    }
}
